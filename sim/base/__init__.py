"""Words everybody uses: errors, units, quantities with their origin, files read as data and written whole."""
