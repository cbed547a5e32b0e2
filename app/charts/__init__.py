"""Charts as pure functions: result dictionaries in, Plotly figures (plain JSON-able dictionaries) out.

Nothing of Plotly is imported here: a figure is data, and the tests validate it with plotly.graph_objects. A colour is
the name of a CSS token (`--activations`), resolved in the browser, so that one palette serves light and dark.
"""
