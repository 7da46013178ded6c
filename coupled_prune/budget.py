"""Budget: how many channels a target sparsity zeroes. In: a target and a number of channels. Out: a number."""

from __future__ import annotations

import math


def budget(min_sparsity: float, channels: int, keep_multiple_of: int | None = None) -> int:
    """Channels to zero: `ceil(min_sparsity * channels)`.

    A product within 1e-6 of an integer is that integer, so a target written in decimals (0.07 of
    100) does not gain a channel from its binary form. `keep_multiple_of` then rounds the kept
    channels up to a multiple, as far as there are channels.
    """
    product = float(min_sparsity) * channels
    nearest = round(product)
    zeroed = nearest if abs(product - nearest) <= 1e-6 else math.ceil(product)
    if keep_multiple_of:
        kept = -(-(channels - zeroed) // keep_multiple_of) * keep_multiple_of
        zeroed = channels - min(kept, channels)
    return zeroed
