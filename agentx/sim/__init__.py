"""The simulated deployment: a small model, driven in virtual time or served over HTTP in real time."""
