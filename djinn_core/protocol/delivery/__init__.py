"""Delivery: exactly-once delivery of frames over connections that may break."""
