"""Weights of an executor: uploads, files that it reads, and a store on disk for later sessions."""
