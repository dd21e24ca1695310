// Clicks and arrow keys on the text of Tokens: tells the page which token was chosen, keeps it in view, and the focus on the text.

let held = false  // the text has the focus, and is to have it again whenever it was drawn anew
let shown = {}  // the token that was last brought into view, and in which box
let asked = null  // the token that was chosen last, until the answer to that is here: there may be several keys before it

let stop = () => {} // ends what the call before has begun: Streamlit calls again with new data, and ends only the last

export default function ({ data, setTriggerValue }) {
  stop()
  if (data.token === asked) asked = null
  const pick = (index) => {
    asked = index
    setTriggerValue("token", index)
  }
  const within = (target) => target.closest?.(".kv-strip")
  const onClick = (event) => {
    const token = event.target.closest?.(".kv-strip > *")
    if (token) pick([...token.parentElement.children].indexOf(token))
  }
  const onKey = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (!by || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return
    const strip = within(event.target)
    const next = (asked ?? data.token) + by
    if (!strip || next < 0 || next >= strip.children.length) return
    event.preventDefault()
    pick(next)
  }
  const onFocus = (event) => { held = Boolean(within(event.target)) }
  const show = () => {
    const chosen = document.querySelector(".kv-strip > .kv-chosen")
    const box = document.querySelector(".st-key-strip")
    if (!chosen || !box) return
    if (held && document.activeElement === document.body) chosen.parentElement.focus({ preventScroll: true })
    const index = [...chosen.parentElement.children].indexOf(chosen)
    if (shown.box === box && shown.index === index) return
    shown = { box, index }
    const [token, frame] = [chosen.getBoundingClientRect(), box.getBoundingClientRect()]
    if (token.top < frame.top + 8 || token.bottom > frame.bottom - 8)
      box.scrollTop += token.top - frame.top - frame.height / 3
  }
  const drawn = new MutationObserver(show)
  const watch = () => {
    const box = document.querySelector(".st-key-strip")
    if (box) drawn.observe(box, { childList: true, subtree: true })
    show()
  }
  const heard = { click: onClick, keydown: onKey, focusin: onFocus, pointerdown: onFocus }
  for (const [name, on] of Object.entries(heard)) document.addEventListener(name, on)
  watch()
  const timer = setTimeout(watch, 150)  // the box may be drawn after this
  stop = () => {
    clearTimeout(timer)
    drawn.disconnect()
    for (const [name, on] of Object.entries(heard)) document.removeEventListener(name, on)
  }
  return stop
}
