"""Uploads of weights, the store that keeps them for later sessions, and disk quotas."""
