"""TwoTower (arXiv 2606.26493): a frozen context tower reads, a trained denoiser tower writes blocks over its cache.

towers       both towers from one pretrained model; the forward that all of the below share
sublayers    where a decoder layer adds to its residual stream
modulation   time conditioning by hooks
prefix       attention: what the denoiser sees of the context tower, in training
recurrent    states of Mamba, linear attention and short convolutions, handed over and never written to
boundaries   those states before every block of a row, from one pass
layout       packed rows to noisy blocks: what is noised, what is scored
training     the training pass, the loss, the held-out bound
reader       both towers at decoding time, over pages
writer       the denoiser in the engine; stateful: the context tower there, where layers are recurrent
canvas       the denoiser's forward that both share
decoding     Algorithm 1, AR mode, likelihoods
lossless     the denoiser drafts, the context tower verifies
adapter      `denoiser: lora`: an adapter over the context tower's weights instead of weights of its own
shared       both towers in one model, and in one forward
folder       the model on disk; adapter_folder: the adapter's part; published: the layout of the published checkpoint
"""
