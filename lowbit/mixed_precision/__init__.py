"""Mixed precision: what each layer of a model loses under each scheme, and the best choice of schemes for a budget of bits."""
