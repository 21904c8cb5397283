"""The documents do what they say: their code runs, their links lead somewhere, the examples earn rewards."""
