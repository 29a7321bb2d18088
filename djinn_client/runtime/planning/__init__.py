"""From recorded programs to plans: made once, found again, and what is known for them."""
