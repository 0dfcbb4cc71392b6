"""The native CPU kernels: C sources, the builder that compiles them once per machine, and the binding."""
