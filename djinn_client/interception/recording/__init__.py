"""The program that a thread is recording: its instructions and its cut points."""
