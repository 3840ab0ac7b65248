"""Where experts live, in how many bits, by the arithmetic of memory."""
