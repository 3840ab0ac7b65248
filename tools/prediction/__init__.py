"""How well the next layer's experts are foretold, and what it costs to run what was foretold."""
