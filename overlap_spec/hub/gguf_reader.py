"""gguf's reader of a .gguf file, made quicker, and with errors that name the tensor.

gguf makes an object of every token in the metadata, which takes seconds; this reader skips arrays, and reads those that
are asked for by name.
"""

import functools
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField


class TensorReader(GGUFReader):
    """Metadata and tensors of a file. Arrays of the metadata are fields without content."""

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Raises: ValueError naming the tensor whose type or size cannot be."""
        for field in fields:
            name, sizes, kind = bytes(field.parts[1]).decode(), field.parts[3].tolist(), int(field.parts[4][0])
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"tensor {name}: found type {kind}, expected one that gguf knows")
            block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            if sizes[0] % block:
                known = GGMLQuantizationType(kind).name
                raise ValueError(f"tensor {name}: found rows of {sizes[0]}, expected a multiple of {block} for {known}")
            end = start_offs + int(field.parts[5][0]) + int(np.prod(sizes)) // block * num_bytes
            if end > len(self.data):
                raise ValueError(f"tensor {name}: found {len(self.data)} bytes in the file, expected at least {end}")
        super()._build_tensors(start_offs, fields)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            parts: tuple[int, list[Any], list[int], list[GGUFValueType]] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        kind, length = GGUFValueType(self._number(orig_offs, 4)), self._number(orig_offs + 4, 8)
        return self._end_of_array(kind, length, orig_offs + 12) - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _end_of_array(self, kind: GGUFValueType, length: int, offset: int) -> int:
        if kind in self.gguf_scalar_to_np:
            return offset + length * int(np.dtype(self.gguf_scalar_to_np[kind]).itemsize)
        for _ in range(length):
            if kind is GGUFValueType.STRING:
                offset += 8 + self._number(offset, 8)
            else:
                offset += self._get_field_parts(offset, kind)[0]
        return offset

    def strings(self, name: str) -> list[str]:
        """An array of texts; [] if the file has none of this name."""
        kind, length, offset = self._array(name)
        if kind is not GGUFValueType.STRING:
            return []
        found = []
        for _ in range(length):
            begin = offset + 8
            offset = begin + self._number(offset, 8)
            found.append(str(self._bytes[begin:offset], "utf-8"))
        return found

    def numbers(self, name: str) -> list[int]:
        """An array of integers; [] if the file has none of this name."""
        kind, length, offset = self._array(name)
        if kind not in self.gguf_scalar_to_np:
            return []
        dtype = np.dtype(self.gguf_scalar_to_np[kind])
        return [int(number) for number in np.frombuffer(self._bytes, dtype, length, offset)]

    def _array(self, name: str) -> tuple[GGUFValueType | None, int, int]:
        """Type and number of the entries of an array, and where they begin."""
        if (field := self.fields.get(name)) is None or field.types[:1] != [GGUFValueType.ARRAY]:
            return None, 0, 0
        begin = field.offset + 8 + self._number(field.offset, 8) + 4  # after its name and its own type
        return GGUFValueType(self._number(begin, 4)), self._number(begin + 4, 8), begin + 12

    @functools.cached_property
    def _bytes(self) -> memoryview:
        """The file; there is a string for each token, and slices of an array would take ten times as long."""
        return self.data.data

    def _number(self, offset: int, num_bytes: int) -> int:
        found = self._bytes[offset : offset + num_bytes]
        if len(found) < num_bytes:
            raise IndexError(f"ends at byte {len(self.data)}, in the middle of its metadata")
        return int.from_bytes(found, "little")
