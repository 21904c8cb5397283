"""The control program's host: who may start (`episodes`), and which weights the engines run (`versions`)."""
