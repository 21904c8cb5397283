"""The tables of the trainer's configuration, one file for each part of the trainer that reads them."""
