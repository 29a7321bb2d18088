"""Verification of a program's ops: `djinn.verify()`.

- `verifying`: the block and its report. `differences`: how far two results are apart. `cpu_copies`: copies of the
  device's memory.
- `recorded_ops`: positions of ops in the user's code, and the same op on the CPU.
"""
