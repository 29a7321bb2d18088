"""A storage that `out=` has grown says so."""

a = torch.ones(3, 1, dtype=torch.float64, device=D)
b = torch.ones(3, device=D)
torch.stack([b, b], out=a)
c = a.untyped_storage().nbytes()
