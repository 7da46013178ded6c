"""Counts the bytes that interpreted kernels load and store, by where they lie."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np

SECTOR = 32


def sectors_of_zeros(tensor):
    """Bytes of the 32-byte sectors in which the zeros of a contiguous tensor lie."""
    places = tensor.flatten().eq(0).nonzero().squeeze(1).numpy() * tensor.element_size()
    return np.unique((tensor.data_ptr() + places) // SECTOR).size * SECTOR


class Traffic:
    """Bytes to and from the `tensors` given, and to and from all other memory (tables and workspace)."""

    def __init__(self, tensors):
        self.spans = [
            (t.untyped_storage().data_ptr(), t.untyped_storage().data_ptr() + t.untyped_storage().nbytes())
            for t in tensors
        ]
        self.bytes = Counter()
        self.stored = []

    def see(self, what, addresses, mask, size):
        addresses = np.broadcast_to(addresses, mask.shape)[mask]
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self.spans:
            inside |= (addresses >= low) & (addresses < high)
        self.bytes[what, "weights"] += int(inside.sum()) * size
        self.bytes[what, "workspace"] += int((~inside).sum()) * size
        if what == "store":
            self.stored.append(np.unique(addresses[inside] // SECTOR))

    @property
    def sectors_stored(self):
        """Bytes of the 32-byte sectors of the weights that were touched by a store."""
        return np.unique(np.concatenate(self.stored or [np.zeros(0)])).size * SECTOR


@contextlib.contextmanager
def counted(monkeypatch, tensors):
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic(tensors)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self, ptrs, mask, other, *rest):
        traffic.see("load", ptrs.data, mask.data.astype(bool), ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(self, ptrs, mask, other, *rest)

    def counting_store(self, ptrs, value, mask, *rest):
        traffic.see("store", ptrs.data, mask.data.astype(bool), ptrs.get_element_ty().primitive_bitwidth // 8)
        return store(self, ptrs, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
        yield traffic
