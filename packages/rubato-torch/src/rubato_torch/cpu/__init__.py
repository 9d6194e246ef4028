"""What makes steps fast on CPUs: compiled kernels for attention, norms and gate, and the choice of matrix products.

`native` runs the kernels that `kernels` writes and `llvm_jit` compiles; the engine works without them, and slower.
"""
