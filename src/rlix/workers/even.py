"""Even shares of things in a row."""


def bounds(count: int, shares: int) -> list[int]:
    """Where each of so many consecutive shares of `count` things begins, and where the last ends: as even as can be,
    the larger ones first. 9 over 4 is 0, 3, 5, 7, 9."""
    return [share * (count // shares) + min(share, count % shares) for share in range(shares + 1)]
