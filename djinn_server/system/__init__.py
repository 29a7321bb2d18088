"""What the operating system offers to servers: free memory, and mapped files. `djinn_core.system` has what clients ask as well."""
