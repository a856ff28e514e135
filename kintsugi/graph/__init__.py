"""A step of training as a graph of model calls: algorithms, the graph, its execution, and the master's own calls."""
