"""Libraries that find the remote device by themselves, one subpackage each."""
