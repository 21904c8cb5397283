"""The trainer's step compared with TRL's (`__main__`): workloads (`load`), the model, and a process for each side."""
