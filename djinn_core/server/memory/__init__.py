"""What an executor with a limit on its memory does to keep it: what goes, where it goes, and how it comes back."""
