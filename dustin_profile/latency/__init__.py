"""How long a step takes on this device: a few measured ones, and a linear model between them."""
