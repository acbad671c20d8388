"""Random streams keyed by what they are for, never by which worker draws from them."""

import hashlib


def stream_seed(*key: int | str) -> int:
    """A 63-bit seed for the stream named by `key`, such as (job seed, step, trajectory id)."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
