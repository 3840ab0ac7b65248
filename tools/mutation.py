"""Damaged copies of good data, repeatable from a seed: bytes, JSON at random keys, and the arrays of an .npz."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# JSON texts in place of a value, not values: Python's own writer makes none of the worst.
HOSTILE_JSON = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "7", "-0.0", "0.5", "1.0", "NaN", "Infinity", "-Infinity"),
    *("1e999", "1e-320", "1e30", "-1e29", "1e9"),
    *map(str, (1 << 15, 1 << 31, 1 << 32, 1 << 40, 1 << 53, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63))),
    *("9" * 400, "9" * 5000, "[]", "{}", "[[]]", '{"a": 1}', "[0]", "[null, -1, 1e999]", '["a", "a"]'),
    *('""', '"0"', '"x"', '"\\ud800"', '"\\u0000"', '"\\u001b]0;title\\u0007"', '"a\\nb\\r\\u0085c"', '"\\u202eabc"'),
    *('"../../etc/passwd"', '"/etc/passwd"', '"."', '".."', '"a/../../b"', '"model\\u0000.safetensors"'),
    *(json.dumps("x" * 300), json.dumps("é" * 100_000), "[" * 500 + "]" * 500, '{"a":' * 900 + "1" + "}" * 900),
    *("[" * 100_000 + "]" * 100_000, "[" * 100_000, "[" + "0," * 5000 + "0]"),
)  # fmt: skip
EXTREMES = (0, 1, 7, 8, 0x7F, 0xFF, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63)
MARK = "\ue000hostile\ue000"  # a private character: in no file that is damaged here


def damage_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to four changes: bits, bytes, integers of eight bytes, pieces lost, doubled or moved, an early end."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        size = len(changed)
        at = chance.randrange(size + 1) if chance.random() < 0.7 else chance.randrange(min(size, 64) + 1)
        length = min(size - at, 1 << chance.randrange(12))
        match chance.choice((0, 0, 1, 1, 2, 3, 4, 5, 6, 6)):
            case 0 if at < size:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at : at + length] = chance.randbytes(length)
            case 2:
                changed[at : at + 8] = chance.choice(EXTREMES).to_bytes(8, "little")
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5:
                del changed[at:]
            case _:
                changed[at : at + length] = bytes(length)
    return bytes(changed)


def damage_json(chance: random.Random, value: Any) -> bytes:
    """The text of `value` with one to three keys or items changed; `value` itself stays as it was."""
    root, raw = [json.loads(json.dumps(value))], []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        parent, key = chance.choice(list(_places(root)))
        _damage_place(chance, parent, key, raw, list(_places(root)))
    text = json.dumps(root[0])
    for found in raw:
        text = text.replace(json.dumps(MARK), found, 1)
    if chance.random() < 0.05:
        text = chance.choice(("\ufeff", " ", "[", "")) + text + chance.choice(("", "\x00", "]", "{}"))
    encoding = chance.choice(("utf-8",) * 30 + ("utf-16", "utf-32"))
    return text.encode(encoding, errors="surrogatepass")


def _damage_place(chance: random.Random, parent: Any, key: Any, raw: list[str], places: list[tuple[Any, Any]]) -> None:
    match chance.randrange(8):
        case 0 if len(places) > 1 and parent is not places[0][0]:
            del parent[key]
        case 1 if isinstance(parent, dict):  # the key a second time: readers differ in which one they believe
            parent[MARK] = parent[key]
            raw.append(json.dumps(key))
        case 2 if isinstance(parent, dict):
            parent[chance.choice((key + "x", key.upper(), "\x1b[2J", "\ud800", "", "x" * 5000))] = parent.pop(key)
        case 3:
            other_parent, other_key = chance.choice(places)
            parent[key] = json.loads(json.dumps(other_parent[other_key]))
        case 4:
            parent[key] = [parent[key]] * chance.choice((0, 1, 2, 50))
        case 5 if isinstance(parent[key], int | float):
            number = parent[key]
            parent[key] = chance.choice(
                (-number, number + 1, number - 1, number * 2, number // 2, float(number), str(number))
            )
        case _:
            parent[key] = MARK
            raw.append(chance.choice(HOSTILE_JSON))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) below `node`, a bounded number of each container."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if len(keys) > 64:  # a vocabulary would otherwise be all that is ever damaged
        keys = [*keys[:16], *keys[len(keys) // 2 :][:16], *keys[-16:]]
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def damage_arrays(chance: random.Random, arrays: dict[str, np.ndarray], header: str) -> bytes:
    """The .npz of `arrays` with one of them, or the JSON in the one named `header`, changed."""
    changed = dict(arrays)
    name = chance.choice(list(changed))
    if chance.random() < 0.4:
        text = damage_json(chance, json.loads(str(changed[header])))
        changed[header] = np.array(text.decode("utf-8", errors="replace"))
        return _npz(changed)
    changes: list[Callable[[np.ndarray], np.ndarray | bytes | None]] = [
        lambda array: None,
        lambda array: array.ravel()[: chance.randrange(array.size + 1)],
        lambda array: np.concatenate([array, array]) if array.ndim else array[None],
        lambda array: array.astype(chance.choice(("bool", "int8", "uint64", "float16", "complex64", "U3", "S2"))),
        lambda array: array.astype(chance.choice((">i4", "<M8[s]", "float64", "int64"))),
        lambda array: _with_extreme(chance, array),
        lambda array: _with_extreme(chance, array),
        lambda array: array[..., None],
        lambda array: np.array([{"a": 1}], dtype=object),
        lambda array: _false_header(chance, array),
    ]
    try:
        with np.errstate(all="ignore"):
            found = chance.choice(changes)(changed.pop(name))
    except (ValueError, TypeError):  # an array that cannot be changed so
        found = b"\x93NUMPY"
    return _npz(changed if found is None else {**changed, name: found})


def _with_extreme(chance: random.Random, array: np.ndarray) -> np.ndarray:
    if not array.size or array.dtype.kind not in "biuf":
        return array
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    values = (
        (np.nan, np.inf, -1.0, 1e300) if array.dtype.kind == "f" else (-1, 0, 1, 3, 1 << 20, (1 << 31) - 1, 1 << 40)
    )
    wide.reshape(-1)[chance.randrange(wide.size)] = chance.choice(values)
    return wide if chance.random() < 0.5 else wide.astype(array.dtype)


def _false_header(chance: random.Random, array: np.ndarray) -> bytes:
    """A .npy whose header claims what it does not hold."""
    shape = chance.choice(
        ("(1152921504606846976,)", "(-1,)", "(3, 1099511627776)", "()", "(1.5,)", "[1]", "(True,)", "(" * 200)
    )
    kind = chance.choice(("'<i4'", "'|O'", "'(1000000,)i4'", "[('a', '<i4')]", "'nonsense'", "None", "'<U1073741824'"))
    text = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes()


def _npz(arrays: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO(array if isinstance(array, bytes) else b"")
            if not isinstance(array, bytes):
                np.lib.format.write_array(member, array, allow_pickle=True)  # to see that it is not read
            archive.writestr(f"{name}.npy", member.getvalue())
    return stream.getvalue()
