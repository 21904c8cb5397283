"""Two trained models that play against each other."""
