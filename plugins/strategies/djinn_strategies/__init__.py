"""Run strategies of executors: compiled code, graphs, batches of several sessions, and packed weights."""
