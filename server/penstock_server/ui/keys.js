// Keys while an input method composes a word (Chinese, Japanese, Korean, ...).

/** Whether the key belongs to the input method: Enter confirms a word there, Escape drops it. Safari ends the word
 * before the key comes, and marks the key with the code 229 alone. */
export const isConfirming = (event) => event.isComposing || event.keyCode === 229;
