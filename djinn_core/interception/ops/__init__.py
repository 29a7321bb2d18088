"""What becomes of an op before it is recorded: cast, taken apart, given other arguments, or left whole."""
