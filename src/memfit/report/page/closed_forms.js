"use strict";
// The closed forms of memfit.report.closed_forms, [Note: closed forms], in the page.

// sequence: factor of the profiled length; activations: factor of bytes an element of activations;
// gradients: factor of bytes of gradients, 0 where they are not held until the update.
function closedPeak(forms, rows, { recomputed = 0, sequence = 1, activations = 1, gradients = 1 } = {}) {
  const at = (line) => (line[0] + line[1] * rows) * sequence * activations;
  const grown = (line) => (line[0] + line[1] * rows) * sequence * (sequence - 1) * activations;
  const chosen = new Set(forms.calls.map((call, i) => (call.is_repeated ? i : -1)).filter((i) => i >= 0).slice(0, recomputed));
  const drops = forms.calls.map((call) => at(call.drops) + grown(call.probabilities));
  let held = 0, peak = 0, atPeak = { held: 0, inside: 0, gradients: 0 };
  const meet = (inside, made) => {
    if (held + inside + made > peak) {
      peak = held + inside + made;
      atPeak = { held, inside, gradients: made };
    }
  };
  forms.calls.forEach((call, i) => {
    meet(at(call.forward_rise) + grown(call.probabilities), 0);
    held += at(call.stays) + (chosen.has(i) ? 0 : drops[i]);
  });
  meet(at(forms.loss_rise), 0);
  let made = 0;
  for (let i = forms.calls.length - 1; i >= 0; i--) {
    const call = forms.calls[i], again = chosen.has(i) ? drops[i] : 0;
    made = gradients ? made + call.gradient_bytes * gradients : call.gradient_bytes;
    meet(again + at(call.backward_rise) + grown(call.probabilities), made);
    held -= at(call.stays) + drops[i] - again;
  }
  return { peak: Math.round(peak), ...atPeak };
}

// flops grow with rows and, but for attention, which is left out, with the sequence.
function closedSeconds(forms, rows, { recomputed = 0, sequence = 1 } = {}) {
  if (!forms.flops_per_s) return 0;
  let flops = 0, left = recomputed;
  for (const call of forms.calls) {
    const forward = call.forward_flops[0] + call.forward_flops[1] * rows, backward = call.backward_flops[0] + call.backward_flops[1] * rows;
    flops += (forward + backward + (call.is_repeated && left-- > 0 ? forward : 0)) * sequence;
  }
  return flops / forms.flops_per_s + (forms.update_elements_per_s ? forms.trainable / forms.update_elements_per_s : 0);
}
