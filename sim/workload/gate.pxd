# Compiled as it is written: plain classes, whose methods need no frames of the interpreter.
