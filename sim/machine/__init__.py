"""What spends time: prices, lanes, copy engines, and the simulated machine that is made of them."""
