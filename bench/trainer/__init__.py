"""The trainer's step beside TRL's (`__main__`): workloads (`load`), the model, and a process for each side."""
