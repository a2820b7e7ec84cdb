"""Every random stream is derived from the run's seed and the words that say what it is for."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *words: str | int) -> int:
    """Return a 63-bit seed that depends on the run's seed and on each word, and on nothing else.

    A rollout's seed is `derive_seed(seed, "rollout", step, prompt.id, sample_index, turn)`: a resumed run, another
    batch order or another number of workers draws the same tokens.
    """
    text = "\x1f".join(str(word) for word in (run_seed, *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
