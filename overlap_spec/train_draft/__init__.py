"""Trains a draft for a target: the engine answers prompts, and its hidden states teach a head (`train-draft`).

prompts.py   the file, its chats as token ids, which are held out
answers.py   scheduler and worker in this process: answers, then hidden states into a ring, which is a proposer that
             guesses nothing
samples.py   answers without repetition loops, the draft vocabulary, batches
head.py      what all drafts have; the parts of the target that they read and begin with
eagle3.py    EAGLE-3: training-time test; a head that is loaded, under the names of its checkpoint
dflash.py    DFlash and DSpark: blocks of masks
steps.py     gradients and the optimiser; on a GPU as graphs
state.py     the directory: a checkpoint as SpecForge has it, and what a later run goes on from
loop.py      rounds, the time limit, held-out prompts
"""
