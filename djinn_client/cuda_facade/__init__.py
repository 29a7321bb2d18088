"""The name `cuda` for the remote device, in a process that `djinn run` started.

No script is rewritten and no call is searched for strings. `cuda` is a device type that PyTorch knows in every build; where
there is no GPU it has neither a guard nor kernels that work. Here it gets those of the remote device (`djinn_client.interception.device.cuda_name`): what
asks PyTorch for memory on `cuda` gets remote tensors. Those say that they are on `cuda` (`tensors`), autocasting for `cuda` is
that of the remote device (`autocast`), and the functions of `torch.cuda` are those of `torch.remote_accelerator`
(`module`). PyTorch's C++ knows the tensors by the remote device's own name all the time, so whatever works there works
here, with builds of PyTorch for CUDA and without.
"""
