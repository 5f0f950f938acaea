"""A quantized model beside its float one: is what it lost the method's, or is something broken?"""
