"""The program that a thread is recording: its instructions, and where it is cut."""
