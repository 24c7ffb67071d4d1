"""The rooms where tensors are contracted: one file a backend."""
