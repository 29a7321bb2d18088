"""Executors that a command such as `ssh` starts, and executors that are forked from a prepared process.

- `holder`: the parent of an executor on another machine.
- `piped_handle`, `piped_holder`, `piped_messages`: a holder that a command starts.
- `fork_server`, `fork_server_client`: executors that are forked from a process that has imported PyTorch.

`djinn.hooks` has the names that plugins use.
"""
