//! Edges and clients that die: the mean is that of the others, or all end and say why.
