"""Vector code compiled at start-up by LLVM, run on PyTorch's own OpenMP threads.

A kernel is a Python function that writes its code through `Code`: 64-bit integers (also as addresses) and vectors of
16 lanes. PyTorch's idle threads spin, so a second pool beside them would take their cores: `launch` runs a kernel on
the libgomp that PyTorch brings.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

try:
    from llvmlite import binding as llvm
    from llvmlite import ir
except ImportError:  # the plain PyTorch path serves then
    llvm = ir = None

LANES = 16
# What RUBATO_CPU=... hides from the compiler: a machine with more stands for one with less.
MASKS = {"avx512": ("avx512bf16", "avx512fp16", "amx"), "avx2": ("avx512", "amx", "avxvnni", "avxneconvert", "avx10")}

# Environment variables that show this CPU as one with less, to the libraries inside PyTorch and to these kernels alike;
# read once by each, so they are for a process that has not begun (docs/server.md; tests, benchmarks/engine_isa.py).
SHOWN_AS: dict[str, dict[str, str]] = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "RUBATO_CPU": "avx512"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "RUBATO_CPU": "avx2",
    },
}


def masked() -> tuple[str, ...]:
    """Prefixes of the instruction sets that the environment variable RUBATO_CPU hides. Raises ValueError."""
    asked = os.environ.get("RUBATO_CPU", "")
    if asked and asked not in MASKS:
        raise ValueError(f"RUBATO_CPU is {asked!r}: give one of {', '.join(MASKS)}, or leave it unset")
    return MASKS.get(asked, ())


def available() -> bool:
    """Whether kernels can be compiled and run on PyTorch's threads here."""
    return llvm is not None and sys.platform == "linux" and platform.machine() == "x86_64" and _libgomp() is not None


@cache
def _libgomp() -> ctypes.CDLL | None:
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ctypes.CDLL(str(found[0])) if found else None


if ir is not None:

    class _BFloat(ir.Type):  # type: ignore[misc]
        """LLVM's bfloat, which llvmlite has no name for; only ever cast to and from integers."""

        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, _BFloat)

        def __hash__(self) -> int:
            return hash(_BFloat)

    I1, I16, I32, I64, F32 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
    VH, VI, VF = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
    pairs_of = ir.VectorType(I32, LANES // 2)  # 16 x 16 bits as 8 x 32
    _VB = ir.VectorType(_BFloat(), LANES)
    _VB2 = ir.VectorType(_BFloat(), 2 * LANES)


def _operator(ints: str, floats: str) -> Callable[[Value, Operand], Value]:
    """An operator of `Value`, by the instruction for integers and the one for floats."""

    def operator(self: Value, other: Operand) -> Value:
        other = self.code.like(self, other)
        name = floats if self.code.is_float(self.ir.type) else ints
        return Value(self.code, getattr(self.code.b, name)(self.ir, other.ir, **self.code.flags(name)))

    return operator


def _comparison(sign: str) -> Callable[[Value, Operand], Value]:
    def comparison(self: Value, other: Operand) -> Value:
        other = self.code.like(self, other)
        how = self.code.b.fcmp_ordered if self.code.is_float(self.ir.type) else self.code.b.icmp_signed
        return Value(self.code, how(sign, self.ir, other.ir))

    return comparison


class Value:
    """A 64-bit integer, a float, or a vector, with the operators that its type has. Python numbers mix in.

    Integers are divided (`//`, `/` and `%`) as if they had no sign, and compared as signed.
    """

    __slots__ = ("code", "ir")

    def __init__(self, code: Code, value: Any) -> None:
        self.code, self.ir = code, value

    __add__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __floordiv__ = __truediv__ = _operator("udiv", "fdiv")
    __mod__ = _operator("urem", "frem")
    __lshift__ = _operator("shl", "shl")
    __rshift__ = _operator("lshr", "lshr")
    __and__ = _operator("and_", "and_")
    __or__ = _operator("or_", "or_")
    __lt__ = _comparison("<")
    __gt__ = _comparison(">")
    equals = _comparison("==")


Operand = Value | int | float


class Variable:
    """A value that changes."""

    def __init__(self, code: Code, value: Value) -> None:
        self.code = code
        with code.b.goto_entry_block():
            self.slot = code.b.alloca(value.ir.type)
        self.set(value)

    def set(self, value: Value) -> None:
        self.code.b.store(value.ir, self.slot)

    def get(self) -> Value:
        return Value(self.code, self.code.b.load(self.slot))


class Code:
    """Writes one kernel, `void(int64 *arguments)`."""

    def __init__(self, module: Any, name: str, dot: bool, wide: int) -> None:
        """dot: there are instructions for products of bfloat16. wide: vectors of sums that one row of a tile keeps in
        registers beside those of the other rows."""
        self.module, self.dot, self.wide = module, dot, wide
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))

    # ------------------------------------------------------------- numbers

    @staticmethod
    def is_float(type: Any) -> bool:
        return type in (F32, VF)

    @staticmethod
    def flags(name: str) -> dict[str, Any]:
        return {"flags": ("contract",)} if name in ("fadd", "fsub", "fmul") else {}

    def short(self, x: int) -> Value:
        return Value(self, ir.Constant(I16, x))

    def like(self, model: Value, x: Operand) -> Value:
        """`x` as a value of the model's type."""
        if isinstance(x, Value):
            return x
        type = model.ir.type
        return Value(self, ir.Constant(type, [x] * LANES if isinstance(type, ir.VectorType) else x))

    def whole(self, x: int) -> Value:
        return Value(self, ir.Constant(I64, x))

    def floats(self, x: float) -> Value:
        return Value(self, ir.Constant(VF, [x] * LANES))

    def lanes(self) -> Value:
        """0, 1, ... 15"""
        return Value(self, ir.Constant(VI, list(range(LANES))))

    def splat(self, x: Value) -> Value:
        """A scalar (float or 32-bit integer) in every lane; a 64-bit one becomes 32 bits."""
        value = self.b.trunc(x.ir, I32) if x.ir.type == I64 else x.ir
        type = ir.VectorType(value.type, LANES)
        one = self.b.insert_element(ir.Constant(type, ir.Undefined), value, ir.Constant(I32, 0))
        zeros = ir.Constant(VI, [0] * LANES)
        return Value(self, self.b.shuffle_vector(one, ir.Constant(type, ir.Undefined), zeros))

    def lane(self, x: Value, i: int) -> Value:
        return Value(self, self.b.extract_element(x.ir, ir.Constant(I32, i)))

    def cast(self, x: Value, type: Any) -> Value:
        return Value(self, self.b.bitcast(x.ir, type))

    def select(self, condition: Value, yes: Value, no: Operand) -> Value:
        return Value(self, self.b.select(condition.ir, yes.ir, self.like(yes, no).ir))

    def call(self, name: str, type: Any, *values: Value) -> Value:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(type, [v.ir.type for v in values]), name)
        return Value(self, self.b.call(function, [v.ir for v in values]))

    def largest(self, x: Value, y: Value) -> Value:
        return self.select(x > y, x, y)

    def smallest(self, x: Value, y: Value) -> Value:
        return self.select(x < y, x, y)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.call("llvm.fma.v16f32", VF, x, y, z)

    def reduce(self, x: Value, how: Callable[[Value, Value], Value]) -> Value:
        """Every lane the sum, the maximum, ... of all."""
        width = LANES // 2
        while width:
            order = ir.Constant(VI, [i ^ width for i in range(LANES)])
            x = how(x, Value(self, self.b.shuffle_vector(x.ir, x.ir, order)))
            width //= 2
        return x

    def exp2(self, x: Value) -> Value:
        """2**x to 3e-6 of its size for x < 127; exactly 0 from about -127 down."""
        x = self.largest(x, self.floats(-127.0))
        whole = self.call("llvm.rint.v16f32", VF, x)
        f = x - whole
        y = self.floats(0.0013333558146428443)
        for c in (0.009618129107628477, 0.05550410866482158, 0.2402265069591007, 0.6931471805599453, 1.0):
            y = self.fma(y, f, self.floats(c))
        power = Value(self, self.b.fptosi(whole.ir, VI))
        return y * self.cast((power + 127) << 23, VF)

    # ------------------------------------------------------------- bfloat16

    def widen(self, x: Value) -> Value:
        """16 bfloat16 as float32."""
        return self.cast(Value(self, self.b.zext(x.ir, VI)) << 16, VF)

    def narrow(self, x: Value) -> Value:
        """16 float32 as bfloat16, rounded to the nearest even."""
        if self.dot:
            return self.cast(self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", _VB, x), VH)
        bits = self.cast(x, VI)
        return Value(self, self.b.trunc(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).ir, VH))

    def dots(self, total: Value, pair: tuple[Value, ...], y: Value) -> Value:
        """total[i] + x[0] * y[2i] + x[1] * y[2i+1]: x a `pair`, y 16 pairs of bfloat16 (as 32-bit integers)."""
        if self.dot:
            a, b = self.cast(pair[0], _VB2), self.cast(y, _VB2)
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", VF, total, a, b)
        low = self.fma(pair[0], self.cast(y << 16, VF), total)
        high = -0x10000 & 0xFFFFFFFF
        return self.fma(pair[1], self.cast(y & high, VF), low)

    @property
    def factor_bytes(self) -> int:
        """Of a number that `store_factors` stored."""
        return 2 if self.dot else 4

    def store_factors(self, x: Value, address: Value) -> None:
        """16 float32, to be read by `pair`: as bfloat16 where there are instructions for its products, else as they
        are, since every reader would have to widen them."""
        self.store(self.narrow(x) if self.dot else x, address)

    def pair(self, address: Value) -> tuple[Value, ...]:
        """Two numbers that `store_factors` stored, each in every lane, for `dots`."""
        if self.dot:
            return (self.splat(self.load(address, I32)),)
        return self.splat(self.load(address, F32)), self.splat(self.load(address + 4, F32))

    # ------------------------------------------------------------- memory and flow

    def load(self, address: Value, type: Any) -> Value:
        pointer = self.b.inttoptr(address.ir, type.as_pointer())
        return Value(self, self.b.load(pointer, align=2 if type in (VH, I16) else 8 if type == I64 else 4))

    def store(self, x: Value, address: Value) -> None:
        type = x.ir.type
        pointer = self.b.inttoptr(address.ir, type.as_pointer())
        self.b.store(x.ir, pointer, align=2 if type in (VH, I16) else 8 if type == I64 else 4)

    def arguments(self, count: int) -> list[Value]:
        base = Value(self, self.function.args[0])
        return [self.load(base + 8 * i, I64) for i in range(count)]

    def thread(self) -> tuple[Value, Value]:
        """This thread's number, and how many there are."""
        found = [self.call(name, I32) for name in ("omp_get_thread_num", "omp_get_num_threads")]
        number, count = (Value(self, self.b.zext(x.ir, I64)) for x in found)
        return number, count

    def barrier(self) -> None:
        self.call("GOMP_barrier", ir.VoidType())

    def share(self, total: Value) -> tuple[Value, Value]:
        """This thread's part [first, last) of 0..total."""
        number, count = self.thread()
        return total * number // count, total * (number + 1) // count

    @contextmanager
    def _repeat(self, number: Callable[[], Value], stop: Operand) -> Iterator[Value]:
        """What is written inside runs for each `number()`, until one is not below `stop`."""
        head, body, done = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        at = number()
        self.b.cbranch((at < stop).ir, body, done)
        self.b.position_at_end(body)
        yield at
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        at = Variable(self, self.like(self.whole(0), start))
        with self._repeat(at.get, stop) as i:
            yield i
            at.set(i + step)

    def tasks(self, counter: Value, total: Value) -> AbstractContextManager[Value]:
        """The threads take the numbers 0..total one by one, each the next one when it is free, from `counter`, the
        address of a 0."""
        pointer = self.b.inttoptr(counter.ir, I64.as_pointer())
        one = ir.Constant(I64, 1)
        return self._repeat(lambda: Value(self, self.b.atomic_rmw("add", pointer, one, "monotonic")), total)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.ir):
            yield


@cache
def _compile(assembly: str, features: str) -> Any:
    """LLVM's engine with this code. Replicas of one model in a process share it: compiling takes half a second."""
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True
    )
    parsed = llvm.parse_assembly(assembly)
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


class Kernels:
    """Compiled kernels. `writers`: name -> the function that writes the kernel's code."""

    def __init__(self, writers: dict[str, Callable[[Code], None]]) -> None:
        gomp = _libgomp()
        assert gomp is not None
        for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"):
            llvm.add_symbol(name, ctypes.cast(getattr(gomp, name), ctypes.c_void_p).value)
        self._parallel = gomp.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        features = llvm.get_host_cpu_features()
        hidden = masked()
        for name in features:
            features[name] = features[name] and not name.startswith(hidden)
        known = {"avx512bf16": "AVX-512 with BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
        self.instructions = next((what for name, what in known.items() if features.get(name)), "plain x86-64")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        wide = 4 if features.get("avx512bf16") else 2 if features.get("avx512f") else 1
        module = ir.Module("rubato")
        for name, write in writers.items():
            code = Code(module, name, bool(features.get("avx512bf16")), wide)
            write(code)
            code.b.ret_void()
        self._engine = _compile(str(module), features.flatten())
        self._addresses = {name: self._engine.get_function_address(name) for name in writers}

    def launch(self, name: str, threads: int, *arguments: torch.Tensor | int) -> None:
        """Run a kernel on so many threads and wait for it. It is given the addresses of tensors."""
        numbers = [x if isinstance(x, int) else x.data_ptr() for x in arguments]
        block = (ctypes.c_int64 * len(numbers))(*numbers)
        self._parallel(self._addresses[name], ctypes.addressof(block), threads, 0)
