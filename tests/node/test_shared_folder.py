"""Whether two hosts mean the same folder by a path."""

from pathlib import Path

from rlix.node.shared_folder import Token, sees


def test_a_token_is_seen_where_the_folder_is_the_same_and_nowhere_else(tmp_path: Path) -> None:
    token, stranger = Token(tmp_path / "runs"), Token(tmp_path / "others")
    assert sees(token.path, token.text, 0.0)
    assert not sees(token.path, stranger.text, 0.0)  # another folder of that name
    assert not sees(tmp_path / "nowhere" / token.path.name, token.text, 0.0)
    assert not sees(tmp_path / "runs", token.text, 0.0)
    token.remove()
    assert not sees(token.path, token.text, 0.0)
    assert list((tmp_path / "runs").iterdir()) == []
