"""The part of plotly.js that pages draw with, as its makers bundle it: `plotly-cartesian.min.js` of npm's
`plotly.js-cartesian-dist-min` 4.1.1, compressed by `gzip -9 -n`; MIT, see LICENSE.

plotly's Python package has the whole alone, which is three times as large.
"""
