"""accelerate: where the weights of a model are kept, and where it computes with them."""
