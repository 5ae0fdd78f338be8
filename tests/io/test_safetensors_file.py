"""Safetensors files: what is written is what the format's own library reads, and the reverse."""

import json
import os
import resource
import signal

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.io._errors import CheckpointError
from fewbit.io._safetensors import DTYPES, SafetensorsFile, SafetensorsWriter, dtype_name

PLAIN = ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"]


def write(path, tensors, metadata=None):
    entries = [(name, dtype_name(a.dtype), a.shape) for name, a in tensors.items()]
    with SafetensorsWriter(path, entries, metadata) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    return writer


def random_array(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    dtype, bits = DTYPES[dtype]
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    count = int(np.prod(shape))
    if bits == 4:
        return rng.integers(0, 16, count, np.uint8).view(dtype).reshape(shape)
    return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(deadline=None, max_examples=60)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(PLAIN), SHAPES),
        max_size=6,
    ),
    metadata=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5), st.just("é"), max_size=3
    ),
    seed=st.integers(0, 2**32),
)
def test_the_format_s_own_library_reads_what_we_write_and_we_what_it_writes(
    tmp_path_factory, tensors, metadata, seed
):
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    arrays = {n: random_array(d, s, seed + i) for i, (n, (d, s)) in enumerate(tensors.items())}
    write(path, arrays, metadata)
    theirs = safetensors.numpy.load_file(path)
    assert set(theirs) == set(arrays)
    for name, array in arrays.items():
        assert theirs[name].dtype == array.dtype and theirs[name].shape == array.shape
        assert theirs[name].tobytes() == array.tobytes()
    with safetensors.safe_open(path, "numpy") as opened:
        assert (opened.metadata() or {}) == metadata
    safetensors.numpy.save_file(arrays, path, metadata or None)
    ours = SafetensorsFile(path)
    assert set(ours.names) == set(arrays) and ours.metadata == metadata
    for name, array in arrays.items():
        for copy in (False, True):
            read = ours.read(name, copy=copy)
            assert read.dtype == array.dtype and read.shape == array.shape
            assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [d for d, (t, _) in DTYPES.items() if t is not None])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    array = random_array(dtype, (3, 4), 7)
    writer = write(tmp_path / "a", {"before": np.zeros(3, np.uint8), "w": array})
    file = SafetensorsFile(tmp_path / "a")
    assert file.info("w").dtype == dtype and file.info("w").shape == (3, 4)
    assert file.info("w").nbytes == 12 * DTYPES[dtype][1] // 8
    assert file.read("w").view(np.uint8).tolist() == array.view(np.uint8).tolist()
    assert file.checksum("w") == writer.checksums["w"]
    assert bytes(file.raw("w")) == b"".join(file.pieces("w", 5))


def test_half_bytes_lie_low_half_first(tmp_path):
    values = np.array([0.5, 1.0, -6.0, 2.0], ml_dtypes.float4_e2m1fn)
    write(tmp_path / "a", {"w": values})
    assert bytes(SafetensorsFile(tmp_path / "a").raw("w")) == bytes([0x21, 0x4F])


def test_a_view_outlives_the_file_object(tmp_path):
    write(tmp_path / "a", {"w": np.arange(4.0)})
    with SafetensorsFile(tmp_path / "a") as file:
        view = file.read("w")
    assert view.tolist() == [0, 1, 2, 3] and not view.flags.writeable
    del view
    assert not [f for f in os.listdir("/proc/self/fd") if _target(f) == str(tmp_path / "a")]


def _target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def test_the_first_tensor_is_aligned_and_same_input_gives_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, {"w": np.arange(4.0)}, {"z": "1", "a": "2"})
    write(tmp_path / "c", {"w": np.arange(4.0)}, {"a": "2", "z": "1"})
    contents = {(tmp_path / name).read_bytes() for name in "abc"}
    assert len(contents) == 1
    assert SafetensorsFile(tmp_path / "a").info("w").begin % 64 == 0


# --- writing that goes wrong ----------------------------------------------------------------------


def test_pieces_out_of_order_too_many_or_too_few(tmp_path):
    tensors = [("a", "U8", (4,)), ("b", "F32", (1,))]
    with pytest.raises(ValueError, match="'b' was written where 'a' comes next"):
        with SafetensorsWriter(tmp_path / "x", tensors) as writer:
            writer.write("b", np.float32([1]))
    with pytest.raises(ValueError, match="a: 1 bytes more than the shape takes"):
        with SafetensorsWriter(tmp_path / "x", tensors) as writer:
            writer.append("a", b"12345")
    with pytest.raises(ValueError, match="a: 4 bytes are needed, 3 were given"):
        with SafetensorsWriter(tmp_path / "x", tensors) as writer:
            writer.write("a", b"123")
    with pytest.raises(ValueError, match=r"b is F32 \(1,\), but \('F64', \(1,\)\) was given"):
        with SafetensorsWriter(tmp_path / "x", tensors) as writer:
            writer.write("a", b"1234")
            writer.write("b", np.ones(1))
    with pytest.raises(ValueError, match="is not complete: 'b' was not written"):
        with SafetensorsWriter(tmp_path / "x", tensors) as writer:
            writer.write("a", b"1234")
    with pytest.raises(ValueError, match="'a' is given twice"):
        SafetensorsWriter(tmp_path / "x", [tensors[0], tensors[0]])
    with pytest.raises(ValueError, match="do not fill whole bytes"):
        SafetensorsWriter(tmp_path / "x", [("a", "F4", (3,))])
    assert os.listdir(tmp_path) == []


def test_an_empty_tensor_between_others(tmp_path):
    arrays = {"a": np.zeros((0, 3), np.int8), "b": np.ones(2, np.int8), "c": np.zeros(0)}
    entries = [(name, dtype_name(a.dtype), a.shape) for name, a in arrays.items()]
    with SafetensorsWriter(tmp_path / "x", entries) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    file = SafetensorsFile(tmp_path / "x")
    assert file.names == ("a", "b", "c") and file.read("a").shape == (0, 3)


def test_a_full_disk_keeps_the_old_file(tmp_path):
    write(tmp_path / "a", {"w": np.arange(4.0)})
    before = (tmp_path / "a").read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
        with pytest.raises(CheckpointError, match=r"could not be written \(File too large\)"):
            write(tmp_path / "a", {"w": np.arange(4000.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == before


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="could not be written .No such file or directory."):
        SafetensorsWriter(tmp_path / "no" / "a", [])


# --- files that are not what they should be -------------------------------------------------------


def file_of(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD = {
    "length beyond the file": ((b"{}", b"", 99), "expected a header of at most 2 bytes, found 99"),
    "length beyond all": ((b"{}", b"", 2**63), "expected a header of at most 2 bytes, found 9223"),
    "no brace": ((b"[]",), "has no header: expected '{' at byte 8, found b'['"),
    "not JSON": ((b"{'a'}",), "has a header that is not JSON"),
    "not UTF-8": ((b'{"\xff":1}',), "has a header that is not JSON"),
    "nested without end": ((DEEP,), "has a header that is not JSON"),
    "a number without end": ((b'{"a":' + b"9" * 9999 + b"}",), "has a header that is not JSON"),
    "NaN": ((b'{"a":NaN}',), "NaN is not JSON"),
    "half a character": ((b'{"\\ud800":1}',), "has a header that is not JSON"),
    "a key twice": ((b'{"a":{},"a":{}}',), "the key 'a' stands there twice"),
    "metadata": (({"__metadata__": {"a": 1}},), "has bad metadata: expected strings by name"),
    "no entry": (({"a": 3},), "tensor 'a' has a bad entry: expected dtype, shape and data_offsets"),
    "more fields": (({"a": {**entry(), "x": 1}}, b"1234"), "tensor 'a' has a bad entry"),
    "dtype": (({"a": entry("F7")}, b"1234"), "has an unknown dtype: expected one of BOOL"),
    "dtype list": (({"a": entry(["U8"])}, b"1234"), "has an unknown dtype"),
    "negative": (({"a": entry(shape=(-4,))}, b"1234"), "has a bad shape"),
    "float shape": (({"a": entry(shape=(4.0,))}, b"1234"), "has a bad shape"),
    "bool shape": (({"a": entry(shape=(True, 4))}, b"1234"), "has a bad shape"),
    "huge": (({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))},), "has a bad shape"),
    "many axes": (({"a": entry(shape=(1,) * 40, offsets=(0, 1))}, b"1"), "has a bad shape"),
    "backwards": (({"a": entry(offsets=(4, 0))}, b"1234"), "has bad data_offsets"),
    "three offsets": (({"a": entry(offsets=(0, 4, 4))}, b"1234"), "has bad data_offsets"),
    "size": (
        ({"a": entry("F32")}, b"1234"),
        "tensor 'a' has the wrong size: expected 16 bytes for F32 of shape (4,), found 4",
    ),
    "half bytes": (({"a": entry("F4", (3,), (0, 2))}, b"12"), "expected whole bytes for F4"),
    "gap": (({"a": entry(offsets=(1, 5))}, b"12345"), "does not begin where the one before it"),
    "overlap": (
        ({"a": entry(), "b": entry(offsets=(2, 6))}, b"123456"),
        "tensor 'b' does not begin where the one before it ends: expected byte 4, found 2",
    ),
    "cut off": (({"a": entry()}, b"123"), "tensor 'a' is cut off"),
    "trailing": (({"a": entry()}, b"12345"), "has bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_say_what_was_expected_and_what_was_found(tmp_path, case):
    arguments, sentence = BAD[case]
    path = file_of(tmp_path / "bad.safetensors", *arguments)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert sentence in str(caught.value) and str(path) in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_files_that_are_no_files(tmp_path):
    with pytest.raises(CheckpointError, match="is not a file"):
        SafetensorsFile(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be opened .No such file or directory."):
        SafetensorsFile(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a file"):
        SafetensorsFile(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="expected at least 8 bytes, found 3"):
        SafetensorsFile(tmp_path / "short")


def test_tensors_that_cannot_be_had(tmp_path):
    path = file_of(
        tmp_path / "a",
        {"six": entry("F6_E2M3", (4,), (0, 3)), "b": entry("BOOL", (1,), (3, 4))},
        b"abc\x02",
    )
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="tensor 'other' is missing from the file"):
        file.read("other")
    with pytest.raises(CheckpointError, match="is F6_E2M3, which has no array type here; use raw"):
        file.read("six")
    assert bytes(file.raw("six")) == b"abc"
    with pytest.raises(CheckpointError, match="is no BOOL: expected bytes 0 and 1, found 2"):
        file.read("b")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write(tmp_path / "a", {"w": np.arange(4.0)})
    file = SafetensorsFile(tmp_path / "a")
    os.truncate(tmp_path / "a", 70)
    for read in (lambda: file.read("w", copy=True), lambda: file.checksum("w")):
        with pytest.raises(CheckpointError, match="is gone; the file was changed while it was"):
            read()
