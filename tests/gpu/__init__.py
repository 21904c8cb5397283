"""What a GPU must show: each test compares a device with the CPU within a bound, which must hold of the CPU itself too.

`-m gpu` chooses the device (`make gpu-check` does); without it, the tests marked `gpu` are left out everywhere.
"""
