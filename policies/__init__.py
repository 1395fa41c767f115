"""One file per published offloading policy; files are found by walking this package, nothing is registered."""
