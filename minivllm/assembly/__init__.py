"""How an engine's parts are chosen and put together, on one rank or several."""
