"""Tests that need a GPU: each compares the device with the CPU within a bound, which must hold of the CPU itself too."""
